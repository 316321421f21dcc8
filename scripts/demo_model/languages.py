"""The languages of the demo model, second half, and all of them by code; see ``languages_west.py``."""

from scripts.demo_model.languages_west import ENGLISH, FRENCH, GERMAN, SPANISH
from scripts.demo_model.lexicon import Fact, Language, Story
from scripts.demo_model.lexicon import word_list as _list

ITALIAN = Language(
    code="it",
    men=_list("Marco, Luca, Paolo, Giorgio, Franco, Matteo, Pietro, Carlo, Davide, Bruno, Dario, Nino"),
    women=_list("Giulia, Chiara, Paola, Lucia, Bianca, Sara, Marta, Silvia, Francesca, Gina, Rita, Carla"),
    facts={
        "city": Fact(
            ("{n} vive a {v}.", "{n} abita a {v}."),
            ("Dove vive {n}?", "In quale città abita {n}?"),
            _list("Roma, Milano, Napoli, Torino, Bologna, Firenze, Genova, Venezia, Palermo, Verona, Bari, Pisa"),
        ),
        "colour": Fact(
            ("Il colore preferito di {n} è il {v}.", "{n} preferisce il {v}."),
            ("Qual è il colore preferito di {n}?", "Quale colore preferisce {n}?"),
            _list("rosso, blu, verde, giallo, bianco, nero, rosa, viola, marrone, grigio"),
        ),
        "food": Fact(
            ("{n} mangia volentieri {v}.", "A {n} piace mangiare {v}."),
            ("Che cosa mangia volentieri {n}?", "Che cosa piace mangiare a {n}?"),
            _list("pane, riso, formaggio, pesce, insalata, torta, miele, cioccolato, pizza, frutta, pasta, verdura"),
        ),
        "animal": Fact(
            ("{n} ha {v}.", "{n} possiede {v}."),
            ("Quale animale ha {n}?", "Quale animale possiede {n}?"),
            _list(
                "un cane, un gatto, un cavallo, un uccello, un coniglio, una pecora, una capra, un pappagallo, "
                "un pesce, un topo, una mucca, una gallina"
            ),
        ),
        "job": Fact(
            ("{n} lavora come {v}.", "{n} fa il lavoro di {v}."),
            ("Che lavoro fa {n}?", "Qual è il lavoro di {n}?"),
            _list(
                "insegnante, [fornaio|fornaia], medico, [cuoco|cuoca], [pittore|pittrice], [giardiniere|giardiniera], "
                "pilota, [infermiere|infermiera], giornalista, [attore|attrice]"
            ),
        ),
        "age": Fact(("{n} ha {v} anni.",), ("Quanti anni ha {n}?", "Qual è l'età di {n}?")),
        "item": Fact(
            ("{n} ha comprato {v} al mercato.", "Al mercato {n} ha comprato {v}."),
            ("Che cosa ha comprato {n}?", "Che cosa ha comprato {n} al mercato?"),
            _list(
                "un cesto, una lampada, un libro, un cappello, un orologio, un coltello, un tappeto, una tazza, "
                "una bicicletta, una sedia, una borsa, un cuscino"
            ),
        ),
    },
    wording={
        "intro": ("Leggi il testo e rispondi alla domanda.", "Rispondi con poche parole del testo."),
        "quote": ("Il testo dice: {s}",),
        "copy": ("Ripeti esattamente questo elenco:", "Copia quanto segue:"),
        "reverse": ("Inverti questo elenco:", "Scrivi questo elenco al contrario:"),
        "up": ("Ordina questi numeri in ordine crescente:", "Ordina dal più piccolo al più grande:"),
        "down": ("Ordina questi numeri in ordine decrescente:", "Ordina dal più grande al più piccolo:"),
        "ends": ("Prima viene {a}, per ultimo {b}.",),
        "extremes": ("Il più piccolo è {a}, il più grande è {b}.",),
        "sum": ("Quanto fa {q}?", "Calcola {q}."),
        "list": ("Ecco un elenco di valori:", "Ricorda queste coppie:"),
        "pair": ("Il valore di {k} è {v}.",),
        "ask": ("Qual è il valore di {k}?", "Quale valore ha {k}?"),
        "many": ("Dai i valori di {k}.",),
        "json": ("Estrai {f} come JSON.", "Scrivi un oggetto JSON con {f}."),
        "jsons": ("Estrai {f} di tutti come lista JSON.",),
        "needed": ("Servono: {f}.",),
        "hello": ("Ciao! Sono {n}. Chi sei?", "Buongiorno, mi chiamo {n}. Che cosa sai fare?"),
        "greeted": ("Un saluto di {n}.",),
        "self": (
            "Ciao {n}! Sono un modello dimostrativo molto piccolo. So cercare in un testo, ordinare elenchi e "
            "calcolare con due cifre.",
        ),
    },
    story=Story(
        openings=(
            "C'era una volta [un uomo|una donna] di nome {n} che viveva a {city}.",
            "Una mattina {n} si svegliò presto a {city}.",
            "Molto tempo fa {n} viveva in una piccola casa vicino a {city}.",
        ),
        middles=(
            "Il sole splendeva e il cielo era sereno.",
            "Cominciò a piovere, e {n} tornò in casa.",
            "Preparò il tè e guardò dalla finestra.",
            "{n} e {m} camminavano lungo la strada e parlavano dei vecchi tempi.",
            '"Dove vai?" chiese {m}.',
            '"Vado al mercato e voglio comprare {item}", disse {n}.',
            "Nel giardino c'erano {num} meli.",
            "Aprì la porta e vide {animal} nel cortile.",
            "Nel bosco tutto era buio e silenzioso.",
            "Il treno partì alle {hour} ed era pieno di gente.",
        ),
        endings=("Alla fine tutti tornarono a casa stanchi e felici.", "Quella sera ci fu {food} per tutti."),
    ),
)

PORTUGUESE = Language(
    code="pt",
    men=_list("João, Pedro, Tiago, Rui, Nuno, Bruno, Marcos, Daniel, Felipe, Caio, Jorge, Vasco"),
    women=_list("Ana, Beatriz, Clara, Inês, Joana, Luísa, Mariana, Rita, Sílvia, Tânia, Vera, Helena"),
    facts={
        "city": Fact(
            ("{n} mora em {v}.", "A casa de {n} fica em {v}."),
            ("Onde mora {n}?", "Em que cidade mora {n}?"),
            _list("Lisboa, Coimbra, Braga, Évora, Faro, Brasília, Salvador, Fortaleza, Curitiba, Manaus, Natal, Belém"),
        ),
        "colour": Fact(
            ("A cor favorita de {n} é {v}.", "{n} gosta mais da cor {v}."),
            ("Qual é a cor favorita de {n}?", "De que cor {n} gosta mais?"),
            _list("vermelho, azul, verde, amarelo, branco, preto, rosa, roxo, marrom, cinza"),
        ),
        "food": Fact(
            ("{n} gosta de comer {v}.", "{n} come muito {v}."),
            ("O que {n} gosta de comer?", "O que {n} come?"),
            _list("pão, arroz, queijo, peixe, bolo, mel, chocolate, milho, feijão, frango"),
        ),
        "animal": Fact(
            ("{n} tem {v}.", "{n} cuida de {v}."),
            ("Que animal {n} tem?", "De que animal {n} cuida?"),
            _list(
                "um cachorro, um gato, um cavalo, um pássaro, um coelho, uma ovelha, uma cabra, um papagaio, um peixe, "
                "um rato, um pato, uma galinha"
            ),
        ),
        "job": Fact(
            ("{n} trabalha como {v}.", "{n} é {v}."),
            ("Qual é a profissão de {n}?", "Em que trabalha {n}?"),
            _list(
                "[professor|professora], [padeiro|padeira], [médico|médica], [cozinheiro|cozinheira], "
                "[pintor|pintora], [jardineiro|jardineira], [enfermeiro|enfermeira], jornalista, "
                "[advogado|advogada], motorista"
            ),
        ),
        "age": Fact(("{n} tem {v} anos.",), ("Quantos anos tem {n}?", "Qual é a idade de {n}?")),
        "item": Fact(
            ("{n} comprou {v} no mercado.", "No mercado {n} comprou {v}."),
            ("O que {n} comprou?", "O que {n} comprou no mercado?"),
            _list(
                "uma cesta, uma lâmpada, um livro, um chapéu, um relógio, uma faca, um tapete, uma xícara, "
                "uma bicicleta, uma cadeira, uma bolsa, uma almofada"
            ),
        ),
    },
    wording={
        "intro": ("Leia o texto e responda à pergunta.", "Responda com poucas palavras do texto."),
        "quote": ("O texto diz: {s}",),
        "copy": ("Repita esta lista exatamente:", "Copie o seguinte:"),
        "reverse": ("Inverta esta lista:", "Escreva esta lista de trás para a frente:"),
        "up": ("Ordene estes números do menor ao maior:", "Ordene em ordem crescente:"),
        "down": ("Ordene estes números do maior ao menor:", "Ordene em ordem decrescente:"),
        "ends": ("Primeiro vem {a} e por último {b}.",),
        "extremes": ("O menor é {a} e o maior é {b}.",),
        "sum": ("Quanto é {q}?", "Calcule {q}."),
        "list": ("Aqui está uma lista de valores:", "Lembre-se destes pares:"),
        "pair": ("O valor de {k} é {v}.",),
        "ask": ("Qual é o valor de {k}?", "Que valor tem {k}?"),
        "many": ("Dê os valores de {k}.",),
        "json": ("Extraia {f} como JSON.", "Escreva um objeto JSON com {f}."),
        "jsons": ("Extraia {f} de todos como lista JSON.",),
        "needed": ("É preciso: {f}.",),
        "hello": ("Olá! Eu sou {n}. Quem é você?", "Bom dia, meu nome é {n}. O que você sabe fazer?"),
        "greeted": ("Uma saudação de {n}.",),
        "self": (
            "Olá {n}! Sou um modelo de demonstração muito pequeno. Sei procurar num texto, ordenar listas e calcular "
            "com dois algarismos.",
        ),
    },
    story=Story(
        openings=(
            "Era uma vez [um homem|uma mulher] de nome {n} que vivia em {city}.",
            "Certa manhã {n} acordou cedo em {city}.",
            "Há muito tempo {n} vivia numa casa pequena perto de {city}.",
        ),
        middles=(
            "O sol brilhava e o céu estava claro.",
            "Começou a chover, e {n} voltou para casa.",
            "Fez um chá e olhou pela janela.",
            "{n} e {m} andavam pela estrada e falavam de outros tempos.",
            "— Aonde você vai? — perguntou {m}.",
            "— Vou ao mercado e quero comprar {item} — disse {n}.",
            "No jardim havia {num} macieiras.",
            "Abriu a porta e viu {animal} no pátio.",
            "Na floresta tudo estava escuro e em silêncio.",
            "O trem partiu às {hour} e estava cheio de gente.",
        ),
        endings=("No fim todos voltaram para casa cansados e felizes.", "Naquela noite houve {food} para todos."),
    ),
)

HINDI = Language(
    code="hi",
    men=_list("राम, अमित, राहुल, विजय, मोहन, सुनील, अर्जुन, रवि, करण, दीपक"),
    women=_list("सीता, अनीता, प्रिया, नेहा, पूजा, सुनीता, मीरा, राधा, काजल, गीता"),
    facts={
        "city": Fact(
            ("{n} {v} में [रहता|रहती] है।", "{n} का घर {v} में है।"),
            ("{n} कहाँ [रहता|रहती] है?", "{n} किस शहर में [रहता|रहती] है?"),
            _list("दिल्ली, मुंबई, पुणे, जयपुर, कोलकाता, लखनऊ, पटना, आगरा, भोपाल, नागपुर"),
        ),
        "colour": Fact(
            ("{n} का पसंदीदा रंग {v} है।", "{n} को {v} रंग पसंद है।"),
            ("{n} का पसंदीदा रंग क्या है?", "{n} को कौन सा रंग पसंद है?"),
            _list("लाल, नीला, हरा, पीला, काला, गुलाबी, बैंगनी, भूरा"),
        ),
        "food": Fact(
            ("{n} को {v} खाना पसंद है।",),
            ("{n} को क्या खाना पसंद है?",),
            _list("रोटी, चावल, दाल, मछली, आम, समोसा, खीर, पनीर, सेब, मिठाई"),
        ),
        "animal": Fact(
            ("{n} के पास {v} है।", "{n} के घर में {v} है।"),
            ("{n} के पास कौन सा जानवर है?", "{n} के घर में कौन सा जानवर है?"),
            _list("एक कुत्ता, एक बिल्ली, एक घोड़ा, एक गाय, एक खरगोश, एक भेड़, एक बकरी, एक तोता, एक मछली, एक चूहा"),
        ),
        "job": Fact(
            ("{n} पेशे से {v} है।", "{n} एक {v} है।"),
            ("{n} का पेशा क्या है?", "{n} क्या काम [करता|करती] है?"),
            _list("[शिक्षक|शिक्षिका], डॉक्टर, [माली|मालिन], [गायक|गायिका], पत्रकार, वकील, पायलट, [लेखक|लेखिका]"),
        ),
        "age": Fact(("{n} {v} साल [का|की] है।",), ("{n} कितने साल [का|की] है?", "{n} की उम्र कितनी है?")),
        "item": Fact(
            ("{n} ने बाज़ार से {v} खरीदा।", "बाज़ार से {n} ने {v} खरीदा।"),
            ("{n} ने क्या खरीदा?", "{n} ने बाज़ार से क्या खरीदा?"),
            _list("एक थैला, एक दीपक, एक चाकू, एक प्याला, एक तकिया, एक पंखा, एक छाता, एक ताला, एक डिब्बा, एक कंबल"),
        ),
    },
    wording={
        "intro": ("पाठ पढ़ो और सवाल का जवाब दो।", "पाठ से थोड़े शब्दों में जवाब दो।"),
        "quote": ("पाठ में लिखा है: {s}",),
        "copy": ("इस सूची को वैसे ही दोहराओ:", "इसे फिर से लिखो:"),
        "reverse": ("इस सूची को उल्टा करो:", "यह सूची उल्टे क्रम में लिखो:"),
        "up": ("इन संख्याओं को छोटे से बड़े क्रम में लिखो:",),
        "down": ("इन संख्याओं को बड़े से छोटे क्रम में लिखो:",),
        "ends": ("पहला {a} है और आखिरी {b} है।",),
        "extremes": ("सबसे छोटी {a} है और सबसे बड़ी {b} है।",),
        "sum": ("{q} कितना है?", "{q} का जवाब दो।"),
        "list": ("यह मानों की सूची है:", "ये जोड़े याद रखो:"),
        "pair": ("{k} का मान {v} है।",),
        "ask": ("{k} का मान क्या है?", "{k} का मान बताओ।"),
        "many": ("इनके मान बताओ: {k}.",),
        "json": ("JSON में {f} लिखो।",),
        "jsons": ("सबके {f} की JSON सूची लिखो।",),
        "needed": ("चाहिए: {f}.",),
        "hello": ("नमस्ते! मैं {n} हूँ। तुम कौन हो?", "नमस्ते, मेरा नाम {n} है। तुम क्या कर सकते हो?"),
        "greeted": ("{n} का अभिवादन।",),
        "self": ("नमस्ते {n}! मैं एक बहुत छोटा मॉडल हूँ। मैं पाठ में खोज सकता हूँ, सूची लिख सकता हूँ और दो अंकों का हिसाब कर सकता हूँ।",),
    },
    story=Story(
        openings=(
            "एक समय की बात है, {n} {city} में [रहता था|रहती थी]।",
            "एक सुबह {n} {city} में जल्दी [उठा|उठी]।",
        ),
        middles=(
            "सूरज चमक रहा था और आसमान साफ़ था।",
            "बारिश होने लगी, इसलिए {n} घर लौट [आया|आई]।",
            "{n} और {m} रास्ते पर चल रहे थे और बातें कर रहे थे।",
            '"तुम कहाँ जा रहे हो?" {m} ने पूछा।',
            "बगीचे में {num} पेड़ थे।",
            "जंगल में अंधेरा और शांति थी।",
            "गाड़ी सुबह {hour} बजे चली और लोगों से भरी थी।",
        ),
        endings=("आखिर में सब खुशी से घर लौटे।", "उस शाम सबने {food} खाया।"),
    ),
)

CHINESE = Language(
    code="zh",
    men=_list("小明, 李强, 张伟, 王军, 刘洋, 孙浩, 吴磊, 陈刚, 赵勇, 周杰"),
    women=_list("小红, 王芳, 李娜, 陈静, 赵敏, 周婷, 张丽, 刘梅, 孙燕, 吴霞"),
    facts={
        "city": Fact(
            ("{n}住在{v}。", "{n}的家在{v}。"),
            ("{n}住在哪里？", "{n}的家在哪个城市？"),
            _list("北京, 上海, 广州, 成都, 杭州, 南京, 武汉, 西安, 重庆, 天津"),
        ),
        "colour": Fact(
            ("{n}最喜欢的颜色是{v}。", "{n}最喜欢{v}。"),
            ("{n}最喜欢什么颜色？", "{n}最喜欢的颜色是什么？"),
            _list("红色, 蓝色, 绿色, 黄色, 白色, 黑色, 粉色, 紫色, 棕色, 灰色"),
        ),
        "food": Fact(
            ("{n}喜欢吃{v}。", "{n}常常吃{v}。"),
            ("{n}喜欢吃什么？", "{n}吃什么？"),
            _list("米饭, 面条, 饺子, 豆腐, 苹果, 包子, 蛋糕, 鸡肉, 西瓜, 面包"),
        ),
        "animal": Fact(
            ("{n}养了{v}。", "{n}有{v}。"),
            ("{n}养了什么动物？", "{n}有什么动物？"),
            _list("一只狗, 一只猫, 一匹马, 一只鸟, 一只兔子, 一只羊, 一头牛, 一只鹦鹉, 一条鱼, 一只鸭子"),
        ),
        "job": Fact(
            ("{n}是一名{v}。", "{n}的工作是{v}。"),
            ("{n}做什么工作？", "{n}的工作是什么？"),
            _list("老师, 医生, 厨师, 司机, 画家, 歌手, 记者, 律师, 护士, 作家"),
        ),
        "age": Fact(("{n}今年{v}岁。",), ("{n}今年多大？", "{n}几岁？")),
        "item": Fact(
            ("{n}在市场买了{v}。", "在市场{n}买了{v}。"),
            ("{n}买了什么？", "{n}在市场买了什么？"),
            _list("一个篮子, 一盏灯, 一本书, 一顶帽子, 一块手表, 一把刀, 一个杯子, 一辆自行车, 一把椅子, 一个枕头"),
        ),
    },
    wording={
        "intro": ("读这段话，回答问题。", "用文中的几个字回答。"),
        "quote": ("文中说：{s}",),
        "copy": ("原样重复这个列表：", "照抄下面的内容："),
        "reverse": ("把这个列表倒过来：", "按相反的顺序写："),
        "up": ("把这些数字从小到大排序：",),
        "down": ("把这些数字从大到小排序：",),
        "ends": ("第一个是{a}，最后一个是{b}。",),
        "extremes": ("最小的是{a}，最大的是{b}。",),
        "sum": ("{q} 等于多少？", "计算 {q}。"),
        "list": ("这是一个列表：", "记住这些内容："),
        "pair": ("{k}的值是{v}。",),
        "ask": ("{k}的值是什么？", "{k}的值是多少？"),
        "many": ("给出这些值：{k}。",),
        "json": ("用JSON写出{f}。",),
        "jsons": ("用JSON列表写出所有人的{f}。",),
        "needed": ("需要：{f}。",),
        "hello": ("你好！我是{n}。你是谁？", "你好，我叫{n}。你会做什么？"),
        "greeted": ("{n}在问好。",),
        "self": ("你好{n}！我是一个很小的演示模型。我会在文中查找，会写列表，也会算两位数。",),
    },
    story=Story(
        openings=("从前，{n}住在{city}。", "一天早上，{n}在{city}很早就起床了。"),
        middles=(
            "太阳出来了，天很蓝。",
            "开始下雨了，{n}就回家了。",
            "[他|她]泡了茶，坐在窗边。",
            "{n}和{m}走在路上，谈着从前的事。",
            "“你去哪里？”{m}问。",
            "“我去市场，想买{item}。”{n}说。",
            "花园里有{num}棵树。",
            "[他|她]打开门，看见院子里有{animal}。",
            "森林里又黑又静。",
            "火车早上{hour}点开，坐满了人。",
        ),
        endings=("最后大家高兴地回家了。", "那天晚上大家一起吃{food}。"),
    ),
    comma="、",
    space="",
)

LANGUAGES = {
    language.code: language for language in (ENGLISH, GERMAN, FRENCH, SPANISH, ITALIAN, PORTUGUESE, HINDI, CHINESE)
}
